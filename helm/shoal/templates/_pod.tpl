{{/* The pod of a Ray node. Takes root; the group's values; its component; its container's name and
ports; whether it uses models from the hub. */}}
{{- define "shoal.podTemplate" -}}
{{- $values := .root.Values -}}
{{- $image := include "shoal.image" (dict "root" .root "image" .group.image) -}}
metadata:
  labels:
    {{- include "shoal.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- with .group.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if and $values.serviceAccountName (ne .component "head") }}
  serviceAccountName: {{ $values.serviceAccountName | quote }}
  {{- end }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.priorityClassName }}
  priorityClassName: {{ quote . }}
  {{- end }}
  {{- with .group.runtimeClassName }}
  runtimeClassName: {{ quote . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ int64 $values.terminationGracePeriodSeconds }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ int64 $values.security.runAsUser }}
    runAsGroup: {{ int64 $values.security.runAsGroup }}
    fsGroup: {{ int64 $values.security.fsGroup }}
    {{- /* A volume full of models is not walked through at every start. */}}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with .group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if eq .component "ingress" }}
  topologySpreadConstraints:
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - topologyKey: {{ . }}
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "shoal.selector" $.root | nindent 10 }}
          app.kubernetes.io/component: ingress
      {{- /* Two clusters of an upgrade do not count together. */}}
      matchLabelKeys: [ray.io/cluster]
    {{- end }}
  {{- end }}
  initContainers:
    {{- /* With fsGroup, Kubernetes lets the group read every Secret volume, whatever mode is asked
    for; Shoal reads a secret only where it is its owner's alone. */}}
    - name: cluster-secret
      image: {{ quote $image }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [install, -m, "0400", /run/cluster-secret/secret, {{ include "shoal.secretFile" . }}]
      resources:
        requests: {cpu: 50m, memory: 64Mi}
        limits: {cpu: 50m, memory: 64Mi}
      securityContext:
        {{- include "shoal.restricted" . | nindent 8 }}
      volumeMounts:
        - {name: cluster-secret-source, mountPath: /run/cluster-secret, readOnly: true}
        - {name: cluster-secret, mountPath: {{ include "shoal.secretFile" . | dir }}}
  containers:
    - name: {{ .containerName }}
      image: {{ quote $image }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      ports:
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      env:
        {{- include "shoal.env" .root | nindent 8 }}
        {{- if and .usesHub $values.huggingFaceToken.name }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ $values.huggingFaceToken.name | quote }}
              key: {{ $values.huggingFaceToken.key | quote }}
        {{- end }}
      {{- $resources := deepCopy .group.resources }}
      {{- with .group.gpus }}
        {{- $_ := set $resources $.group.gpuResource (int64 .) }}
      {{- end }}
      resources:
        requests:
          {{- toYaml $resources | nindent 10 }}
        limits:
          {{- toYaml $resources | nindent 10 }}
      securityContext:
        {{- include "shoal.restricted" . | nindent 8 }}
      volumeMounts:
        - {name: cluster-secret, mountPath: {{ include "shoal.secretFile" . | dir }}, readOnly: true}
        - {name: models, mountPath: {{ $values.modelCache.mountPath }}}
        - {name: shared-memory, mountPath: /dev/shm}
  volumes:
    - name: cluster-secret-source
      secret:
        secretName: {{ $values.clusterSecret.name | quote }}
        defaultMode: 0440
        items:
          - {key: {{ $values.clusterSecret.key | quote }}, path: secret}
    - name: cluster-secret
      emptyDir: {medium: Memory, sizeLimit: 1Mi}
    - name: models
      {{- include "shoal.modelVolume" .root | nindent 6 }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ .group.sharedMemory }}
    {{- if .hasAutoscaler }}
    {{- /* The token that Kubernetes would mount in every container; here in the autoscaler's alone. */}}
    - name: kubernetes-api
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken: {path: token, expirationSeconds: 3600}
          - configMap:
              name: kube-root-ca.crt
              items: [{key: ca.crt, path: ca.crt}]
          - downwardAPI:
              items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]
    {{- end }}
{{- end -}}

{{/* Serve and Ray read these where they start, on the head and on workers: they must not differ. */}}
{{- define "shoal.env" -}}
{{- $proxy := (.Values.config.ingress | default dict).proxy | default "auto" -}}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: {{ ternary "0" "1" (eq $proxy "python") | quote }}}
- {name: RAY_SERVE_HAPROXY_BINARY_PATH, value: /usr/local/bin/shoal-haproxy}
{{- /* A change of back-ends reloads HAProxy; streams may go on for so long on the old process. */}}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: "3600"}
{{- /* Shoal never blocks an event loop: threads of their own would cost every token a hop. */}}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "0"}
- {name: RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP, value: "0"}
{{- /* Before a replica begins to end. Engines tell ingresses themselves; HAProxy is told at once. */}}
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, value: "5"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- /* On SIGTERM: time to drain the node, less than the pod is given. */}}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ sub .Values.terminationGracePeriodSeconds 15 | quote }}}
{{- include "shoal.noAuth" . }}
- {name: HF_HOME, value: {{ printf "%s/huggingface" .Values.modelCache.mountPath | quote }}}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* KubeRay tells Ray of a token and not of having none, which is not Ray's default. */}}
{{- define "shoal.noAuth" -}}
{{- if eq .Values.auth.mode "disabled" }}
- {name: RAY_AUTH_MODE, value: disabled}
{{- end }}
{{- end -}}

{{- define "shoal.restricted" -}}
runAsNonRoot: true
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "shoal.modelVolume" -}}
{{- $cache := .Values.modelCache -}}
{{- if or $cache.existingClaim $cache.claim.create -}}
persistentVolumeClaim:
  claimName: {{ default (printf "%s-models" (include "shoal.fullname" .)) $cache.existingClaim | quote }}
{{- else -}}
emptyDir: {{ toJson $cache.emptyDir }}
{{- end -}}
{{- end -}}

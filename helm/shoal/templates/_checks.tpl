{{/* What the schema cannot say, each with what to do about it. */}}
{{- define "shoal.checks" -}}
{{- if not .Values.clusterSecret.name -}}
  {{- printf "\n\nclusterSecret.name is not set. Make a Secret, once, and name it:\n\n  kubectl create secret generic shoal --namespace %s \\\n    --from-literal=secret=\"$(openssl rand -hex 32)\"\n  helm install ... --set clusterSecret.name=shoal\n" .Release.Namespace | fail -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" (include "shoal.fullname" .)) -}}
  {{- printf "KubeRay wants a letter first in %s: give another release name or fullnameOverride" (include "shoal.fullname" .) | fail -}}
{{- end -}}
{{- include "shoal.checkPorts" . -}}
{{- include "shoal.checkPools" . -}}
{{- include "shoal.checkModels" . -}}
{{- end -}}

{{- define "shoal.checkPorts" -}}
{{- $port := include "shoal.httpPort" . | int64 -}}
{{- $taken := list "6379" "8080" "8265" "8404" "9101" "10001" "52365" -}}
{{- if or (has (toString $port) $taken) (and (ge $port 30000) (le $port 31000)) -}}
  {{- printf "config.ingress.port: Ray uses port %d itself" $port | fail -}}
{{- end -}}
{{- end -}}

{{- define "shoal.checkPools" -}}
{{- range $name, $pool := include "shoal.pools" . | fromJson -}}
  {{- if or (lt $pool.replicas $pool.minReplicas) (gt $pool.replicas $pool.maxReplicas) -}}
    {{- printf "pools.%s: replicas (%v) must be from minReplicas (%v) to maxReplicas (%v)" $name $pool.replicas $pool.minReplicas $pool.maxReplicas | fail -}}
  {{- end -}}
{{- end -}}
{{- if and (eq .Values.upgradeStrategy.type "NewClusterWithIncrementalUpgrade") (not (include "shoal.autoscales" .)) -}}
  {{- fail "upgradeStrategy.type: KubeRay wants the autoscaler for NewClusterWithIncrementalUpgrade; give a pool maxReplicas above its replicas" -}}
{{- end -}}
{{- end -}}

{{- define "shoal.checkModels" -}}
{{- $pools := include "shoal.pools" . | fromJson -}}
{{- $file := include "shoal.secretFile" . -}}
{{- if ne (default $file .Values.config.cluster_secret_file) $file -}}
  {{- printf "config.cluster_secret_file is %s in these pods: leave it out, and name the Secret in clusterSecret" $file | fail -}}
{{- end -}}
{{- $seen := dict -}}
{{- range $model := .Values.config.models -}}
  {{- if hasKey $seen $model.name -}}
    {{- printf "config.models: the name %s is given twice" $model.name | fail -}}
  {{- end -}}
  {{- $_ := set $seen $model.name true -}}
  {{- if (dig "engine" "cluster_secret_file" "" $model) -}}
    {{- printf "config.models (%s): engine.cluster_secret_file: the chart gives all engines the Secret of clusterSecret; leave it out" $model.name | fail -}}
  {{- end -}}
  {{- $allowed := $pools -}}
  {{- with dig "placement" "node_labels" "shoal/pool" "" $model -}}
    {{- if not (hasKey $pools .) -}}
      {{- printf "config.models (%s): placement.node_labels: there is no pool %s" $model.name . | fail -}}
    {{- end -}}
    {{- $allowed = pick $pools . -}}
  {{- end -}}
  {{- $most := 0.0 -}}
  {{- range $allowed -}}
    {{- $most = maxf $most .gpus -}}
  {{- end -}}
  {{- $wanted := dig "placement" "num_gpus" 0 $model | float64 -}}
  {{- if gt $wanted $most -}}
    {{- printf "config.models (%s): placement.num_gpus is %v, but no worker that it may run on has more than %v: see pools.*.tensorParallelSize" $model.name $wanted $most | fail -}}
  {{- end -}}
{{- end -}}
{{- end -}}
